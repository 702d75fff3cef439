from palaver.cli import main

main()
