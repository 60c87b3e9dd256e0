"""Compile all kernels ahead of a first start: `python -m engine.worker.native`."""

from engine.worker.native.build import compile_all
from engine.worker.native.team import Team

if __name__ == "__main__":
    Team(1)
    compile_all(lambda what, done, total: None)
