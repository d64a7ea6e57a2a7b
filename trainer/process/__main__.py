"""`python -m trainer.process`: becomes a rank."""

from trainer.process.rank import main

if __name__ == "__main__":
    main()
