"""One thread: the matrices are small, and threads that wait for each other on a busy machine cost more than they give."""

import torch

torch.set_num_threads(1)
