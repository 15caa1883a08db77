"""The launcher: a command becomes one supervised process per task of a cluster, without TensorFlow."""
