"""`python -m tests.fuzz.models FIRST LAST`."""

import logging

import torch
import transformers

from tests.fuzz.models.case import play
from tests.fuzz.playing import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    main(play)
