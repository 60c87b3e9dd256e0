"""gradio's chat over a server, in the environment of `make clients`; prints its own address.

python gradio_frontend.py URL
"""

import os
import sys

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_OFFLINE"] = "1"

import gradio


def main() -> None:
    chat = gradio.load_chat(f"{sys.argv[1]}/v1", "builtin", token="any")
    _, address, _ = chat.launch(server_name="127.0.0.1", quiet=True, prevent_thread_lock=True)
    print(address, flush=True)
    chat.block_thread()


if __name__ == "__main__":
    main()
