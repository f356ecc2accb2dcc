"""How fast ndistribute is, beside TensorFlow doing the same work in the same run."""
