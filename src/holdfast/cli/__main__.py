"""`python -m holdfast.cli`, for machines where the script is not on the path."""

from holdfast.cli import main

main()
