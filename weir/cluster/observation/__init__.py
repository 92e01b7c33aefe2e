"""Reports of single batches and requests, as a console receives and keeps them."""
