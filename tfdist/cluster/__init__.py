"""A cluster's description, its resolvers, and checks that all tasks agree before TensorFlow starts."""
