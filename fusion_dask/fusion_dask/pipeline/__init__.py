"""The pipeline: runs the segments of a training run over the stages of a plan."""
