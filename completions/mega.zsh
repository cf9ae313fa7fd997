#compdef mega

_mega_completion() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _MEGA_COMPLETE=complete_zsh mega)
}

compdef _mega_completion mega
