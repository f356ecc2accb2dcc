"""TensorFlow's names, for scripts that were written for TensorFlow."""
