"""`python -m tests.fuzz.images FIRST LAST`."""

import logging

import torch
import transformers

from tests.fuzz.images.case import play_case
from tests.fuzz.playing import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # deaths are drawn
    transformers.utils.logging.disable_progress_bar()
    main(play_case)
