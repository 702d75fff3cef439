"""The few programs the model knows by heart."""

from __future__ import annotations

PROGRAMS = {
    ("hello world", "Python"): 'print("Hello, world!")',
    ("hello world", "JavaScript"): 'console.log("Hello, world!");',
    ("hello world", "C"): '#include <stdio.h>\n\nint main(void) {\n    printf("Hello, world!\\n");\n    return 0;\n}',
    ("hello world", "Rust"): 'fn main() {\n    println!("Hello, world!");\n}',
    ("hello world", "Bash"): 'echo "Hello, world!"',
    ("fizzbuzz", "Python"): (
        'for n in range(1, 101):\n    word = ""\n    if n % 3 == 0:\n        word += "Fizz"\n    if n % 5 == 0:\n'
        '        word += "Buzz"\n    print(word or n)'
    ),
    ("fizzbuzz", "JavaScript"): (
        'for (let n = 1; n <= 100; n++) {\n  let word = "";\n  if (n % 3 === 0) word += "Fizz";\n'
        '  if (n % 5 === 0) word += "Buzz";\n  console.log(word || n);\n}'
    ),
    ("factorial", "Python"): (
        "def factorial(n):\n    result = 1\n    for k in range(2, n + 1):\n        result *= k\n    return result\n\n\n"
        "print(factorial(10))"
    ),
    ("factorial", "JavaScript"): (
        "function factorial(n) {\n  let result = 1;\n  for (let k = 2; k <= n; k++) {\n    result *= k;\n  }\n"
        "  return result;\n}\n\nconsole.log(factorial(10));"
    ),
    ("fibonacci", "Python"): (
        "def fibonacci(count):\n    numbers = []\n    a, b = 0, 1\n    for _ in range(count):\n        numbers.append(a)\n"
        "        a, b = b, a + b\n    return numbers\n\n\nprint(fibonacci(10))"
    ),
    ("fibonacci", "JavaScript"): (
        "function fibonacci(count) {\n  const numbers = [];\n  let [a, b] = [0, 1];\n  while (numbers.length < count) {\n"
        "    numbers.push(a);\n    [a, b] = [b, a + b];\n  }\n  return numbers;\n}\n\nconsole.log(fibonacci(10));"
    ),
}
