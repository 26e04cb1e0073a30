"""`python -m holdfast.cli`, for where the script is not on the path."""

from holdfast.cli import main

main()
