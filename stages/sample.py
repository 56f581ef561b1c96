"""Draw a grid of samples, base | adapter | EMA; whatever is missing upstream is made first."""

from stages import door

if __name__ == "__main__":
    door("sample")
