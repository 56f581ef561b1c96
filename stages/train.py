"""Train an adapter; whatever is missing upstream is made first."""

from stages import door

if __name__ == "__main__":
    door("train")
