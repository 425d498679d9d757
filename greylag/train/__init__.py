"""Training: a job becomes measured Steps, on one process or many. `greylag train JOB` is the whole of it.

Its parts serve alone as well:

    from greylag.train.data import Corpus, find_files

    tokens = Corpus(find_files(["python-stdlib"]), sequence=256, seed=0).windows(first=0, count=4)  # (4, 257)
"""
