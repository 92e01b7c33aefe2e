"""File formats of batch jobs: JSON Lines, NumPy, Parquet, folders."""
