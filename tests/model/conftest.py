"""One thread: the matrices are small, and on a busy machine threads cost more than they give."""

import torch

torch.set_num_threads(1)
