"""`python -m mega`, which is also how torchrun starts every rank."""

from mega.cli import entry

if __name__ == "__main__":
    entry()
