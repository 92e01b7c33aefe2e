"""What is stored of a batch job: its record, plan and progress."""
