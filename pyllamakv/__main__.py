"""Run the command line as ``python -m pyllamakv``."""

from pyllamakv.cli.main import main

main()
