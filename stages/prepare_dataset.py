"""Check, hash, caption and bucket a folder of pictures."""

from stages import door

if __name__ == "__main__":
    door("prepare_dataset")
