"""The subcommands of `encoder-service`: one small module each."""
