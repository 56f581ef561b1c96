"""On how many examples a property of buckets, plans and keys is tried.

PROPERTY_EXAMPLES=10000 python -m pytest -m 'not slow' tests/unit/test_buckets.py
"""

import os

from hypothesis import settings

many = settings(max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "200")))
