"""`python -m greylag`."""

from greylag.cli import main

main()
