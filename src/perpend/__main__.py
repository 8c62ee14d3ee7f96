"""`python -m perpend`, as torchrun starts it."""

from perpend.cli import main

if __name__ == "__main__":
    main()
