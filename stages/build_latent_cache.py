"""Encode each picture's variants once."""

from stages import door

if __name__ == "__main__":
    door("build_latent_cache")
