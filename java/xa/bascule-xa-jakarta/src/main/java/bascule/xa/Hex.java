package bascule.xa;

/** Bytes as hexadecimal digits, the form in requests. */
final class Hex {
    private static final String DIGITS = "0123456789abcdef";

    private Hex() {}

    static String of(byte[] bytes) {
        return of(bytes, 0, bytes.length);
    }

    static String of(byte[] bytes, int offset, int length) {
        StringBuilder text = new StringBuilder(2 * length);
        for (int i = offset; i < offset + length; i++) {
            text.append(DIGITS.charAt((bytes[i] >> 4) & 0xf)).append(DIGITS.charAt(bytes[i] & 0xf));
        }
        return text.toString();
    }

    static byte[] parse(String digits) {
        byte[] bytes = new byte[digits.length() / 2];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) Integer.parseInt(digits.substring(2 * i, 2 * i + 2), 16);
        }
        return bytes;
    }
}
