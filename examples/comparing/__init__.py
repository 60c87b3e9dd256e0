"""What `86_compare_servers.py` is made of: servers, loads, tables."""
