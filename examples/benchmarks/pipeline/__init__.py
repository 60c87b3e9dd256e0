"""Pipeline parallelism, measured on this machine and simulated on described hardware."""
