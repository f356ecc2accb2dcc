"""Scripts of TensorFlow 2 that run after one import is changed."""
