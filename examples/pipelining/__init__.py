"""For `92_pipeline.py`: stages on this machine, and on hardware that is only described."""
