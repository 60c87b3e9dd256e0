"""`python -m podway COMMAND`, as the console script `podway`."""

from gateway.console import main

if __name__ == "__main__":
    main()
