"""Write the trained adapter in a format that other tools read."""

from stages import door

if __name__ == "__main__":
    door("export")
