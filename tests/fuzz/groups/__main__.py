"""`python -m tests.fuzz.groups FIRST LAST`."""

from tests.fuzz.groups.case import play
from tests.fuzz.playing import main

if __name__ == "__main__":
    main(play)
