"""What `98_gpu_check.py` is made of: its stages, and the page that tells of them."""
