"""Instances of any backend in processes of their own, which may crash without taking the worker along."""
