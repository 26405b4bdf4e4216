"""Run `python -m qa`, from the root of a checkout."""

from qa.main import main

if __name__ == "__main__":
    main()
