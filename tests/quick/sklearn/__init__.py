"""Stands in for scikit-learn in processes that want its digits alone: to import it takes a second.

A process finds it if this folder's parent comes before scikit-learn in its path.
"""
