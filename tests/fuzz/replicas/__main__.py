"""`python -m tests.fuzz.replicas FIRST LAST`."""

from tests.fuzz.playing import main
from tests.fuzz.replicas.case import play

if __name__ == "__main__":
    main(play)
