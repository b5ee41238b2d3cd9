"""What the commands of ``dsa-compile`` do; ``dsa_compile.cli`` holds their arguments."""
