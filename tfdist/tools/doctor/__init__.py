"""`tfdist doctor`: facts about hosts, a cluster and a run become checks, before TensorFlow starts."""
