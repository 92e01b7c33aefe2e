"""Where models live: the folders of a Triton model repository, and what `config.pbtxt` says in them."""
