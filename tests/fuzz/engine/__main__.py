"""`python -m tests.fuzz.engine FIRST LAST`."""

from tests.fuzz.engine.case import play
from tests.fuzz.playing import main

if __name__ == "__main__":
    main(play)
