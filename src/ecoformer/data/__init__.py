"""Data sets and the samples that come with scikit-learn."""
