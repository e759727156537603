# `farandole completion bash|zsh|fish`: the script with which a shell completes our commands and flags.
# Pure: text from the declarations of options.py.
"""The flags are those of `farandole run` and `horovodrun`; other commands complete to files."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.launch.options import table

BASH = """_farandole() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  if [[ ${COMP_WORDS[0]##*/} == farandole && $COMP_CWORD == 1 ]]; then
    COMPREPLY=($(compgen -W "COMMANDS" -- "$word"))
  elif [[ $word == -* && ( ${COMP_WORDS[1]} == run || ${COMP_WORDS[0]##*/} == horovodrun ) ]]; then
    COMPREPLY=($(compgen -W "FLAGS" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}
complete -o filenames -F _farandole farandole horovodrun
"""
ZSH = """#compdef farandole horovodrun
autoload -U +X bashcompinit && bashcompinit
"""
SHELLS = ("bash", "zsh", "fish")
HOW = """usage: farandole completion bash|zsh|fish

  eval "$(farandole completion bash)"             in ~/.bashrc
  eval "$(farandole completion zsh)"              in ~/.zshrc, after compinit
  farandole completion fish | source              in ~/.config/fish/config.fish
"""


def script(shell: str, commands: Sequence[str]) -> str:
    """The text for a shell."""
    flags = sorted(table())
    if shell == "fish":
        lines = [f"complete -c farandole -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
        for word in flags:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-{'s' if len(word) == 2 else 'o'} {word[1:]}"
            lines.append(f"complete -c farandole -n '__fish_seen_subcommand_from run' {kind}")
            lines.append(f"complete -c horovodrun {kind}")
        return "\n".join(lines) + "\n"
    text = BASH.replace("COMMANDS", " ".join(commands)).replace("FLAGS", " ".join(flags))
    return text if shell == "bash" else ZSH + text
