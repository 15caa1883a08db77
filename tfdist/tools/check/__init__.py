"""Command `tfdist check`: traps of a Keras script on its way to a distribution strategy."""
