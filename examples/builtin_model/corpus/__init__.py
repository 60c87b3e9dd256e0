"""The built-in model's training text: every sentence is generated here, from a seed.

Each file is one skill: a function `(random, held) -> Example`. With `held` true it uses only
phrasings, sums and names that no training example ever uses, so the same code makes both the
training text and the examination.
"""
