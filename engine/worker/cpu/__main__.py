"""Compile all kernels ahead of a first start: `python -m engine.worker.cpu`."""

from engine.worker.cpu.build import compile_all
from engine.worker.cpu.thread_pool import NativeThreadPool

if __name__ == "__main__":
    NativeThreadPool(1)
    compile_all(lambda what, done, total: None)
