"""The explorer (``meshwright ui``): a local page over the predictor and the folders of runs. Optional: extra ``ui``."""
