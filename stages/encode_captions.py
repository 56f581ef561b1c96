"""Encode each unique caption once."""

from stages import door

if __name__ == "__main__":
    door("encode_captions")
