"""The guides are programs; `test_guides.py` runs them."""

collect_ignore = ["guides"]
