"""`tfdist doctor`: checks of hosts, a cluster and a run before training starts."""
